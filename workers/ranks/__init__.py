"""Ranks that form one learner: the processes of one process group, which train one model (DDP, FSDP2, HSDP).

The run sees one learner with one id. Rank 0 speaks for it. On the bus a fragment is always whole; one rank, its server,
gathers and serves it. docs/explanation/ranks.md gives the reasons.

| module | what it does |
|---|---|
| `row_ranges` | computes which elements each rank holds and which rank sends what (pure) |
| `placement` | chooses the rank that serves each fragment (pure) |
| `step_agreement` | encodes what the ranks tell each other at each step, and what rank 0 decides (pure) |
| `snapshot_requests` | tracks the snapshots that rank 0 wants |
| `inflight` | tracks, at rank 0, the fragments that have work in flight and the room that each server has left |
| `topology` | finds the ranks of one learner and lets them meet; the only module that knows torch.distributed |
| `handshake` | defines the messages that the ranks exchange when they meet |
| `lines`, `wires` | connect the ranks' exchange threads; define the requests that go over these connections |
| `gather` | does one rank's share of the transfers: its pieces, and the fragments that it serves |
| `rank_carrier` | lets rank 0 direct the transfers of all ranks |
| `rank_exchange`, `rank_thread` | run what a rank does beside its training, and the thread for it |
| `replicas` | checks that replicas of the same parameters are trained alike |
| `shard_broadcast` | passes the work-queue shards that rank 0 claims to all ranks, for `learner.batches` |
| `exit_barrier` | makes all ranks leave after the same step |
| `watchdog` | handles a request to end that arrives while the main thread is inside torch |
| `rank_learner` | is the training thread's side of a rank |
| `gloo_exit` | waits for gloo's threads when Python ends |
"""
