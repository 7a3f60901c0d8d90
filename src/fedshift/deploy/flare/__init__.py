"""The NVIDIA FLARE adapter: start-up kits, services, jobs, and the engine that carries messages."""
