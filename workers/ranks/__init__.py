"""Ranks that are one learner: processes of one process group, which train one model (DDP, FSDP2, HSDP).

To the run they are one learner with one id. Rank 0 speaks for it; fragments stay canonical on the bus, and are
gathered and served by one rank each. docs/explanation/ranks.md says why.

| file | what |
|---|---|
| `shares` | which elements each rank holds, and who sends what (pure) |
| `turns` | which rank serves which fragment (pure) |
| `agreed` | what ranks tell each other at each step, and what rank 0 decides (pure) |
| `wishes` | which snapshots rank 0 wants |
| `under_way` | with which fragments something is under way at rank 0, and what servers have room for |
| `found` | which ranks are one learner, and how they meet: all that knows torch.distributed |
| `told` | what they say then |
| `lines`, `wires` | connections between them, of their exchange threads; what they ask each other over these |
| `part` | what each rank carries: its pieces, and the fragments that it serves |
| `carrier` | rank 0's way to all parts |
| `working`, `thread` | what a rank does beside its training; the thread for that |
| `replicas` | whether what all ranks hold is trained alike |
| `shards_told` | the shards of the work queue that rank 0 takes up, for `learner.batches` of all |
| `parting` | leaving after the same step |
| `stuck` | being asked to end inside torch |
| `joined` | its training thread's side |
| `resting` | as Python ends, gloo's threads come to rest |
"""
