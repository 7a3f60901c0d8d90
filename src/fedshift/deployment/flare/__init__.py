"""The NVIDIA FLARE adapter: kits, services, jobs, and the engine that carries messages."""
