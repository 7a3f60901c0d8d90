"""The NVIDIA FLARE adapter: start-up kits, services, jobs, and the engine that carries messages.

Which parts of FLARE it uses, and why:

* `Controller`, `Executor`: one `Task` per site, asked every 0.1 s. The Collaboration API is faster, but its calls
  bypass `apply_filters`.
* Drivers (`comm_driver_path`): ours between the processes of a role, since FLARE offers loopback, open to every user
  of the machine; ours at the coordinator's port, since FLARE's `tcp` waits for each TLS handshake where it accepts
  connections and reserves up to 2 GiB for a frame. The bytes on the wire are the same.
* Large messages cross in parts beyond 160 MiB an exchange in all, of at most 8 MiB each (`FEDSHIFT_IN_FLIGHT`); a
  lost part is asked for again for two minutes.
* Not used: snapshots to restart; secure aggregation, which FLARE has not: keys and shares travel in further exchanges
  of the same messages.
* `make test-flare-next` runs the tests of deployments under FLARE's newest pre-release; 2.9.0 and 2.9.1rc5 pass them.
"""
