"""Ranks that are one learner: processes of one process group, which train one model (DDP, FSDP2, HSDP).

To the run they are one learner with one id. Rank 0 speaks for it; fragments stay canonical on the bus, and are
gathered and served by one rank each. docs/explanation/ranks.md says why.

| file | what |
|---|---|
| `row_ranges` | which elements each rank holds, and who sends what (pure) |
| `placement` | which rank serves which fragment (pure) |
| `step_agreement` | what ranks tell each other at each step, and what rank 0 decides (pure) |
| `snapshot_requests` | which snapshots rank 0 wants |
| `inflight` | with which fragments something is under way at rank 0, and what servers have room for |
| `topology` | which ranks are one learner, and how they meet: all that knows torch.distributed |
| `handshake` | what they say then |
| `lines`, `wires` | connections between them, of their exchange threads; what they ask each other over these |
| `gather` | what each rank carries: its pieces, and the fragments that it serves |
| `rank_carrier` | rank 0's way to all parts |
| `rank_exchange`, `rank_thread` | what a rank does beside its training; the thread for that |
| `replicas` | whether what all ranks hold is trained alike |
| `shard_broadcast` | the shards of the work queue that rank 0 takes up, for `learner.batches` of all |
| `exit_barrier` | leaving after the same step |
| `watchdog` | being asked to end inside torch |
| `rank_learner` | its training thread's side |
| `gloo_exit` | as Python ends, gloo's threads come to rest |
"""
