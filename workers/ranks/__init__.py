"""Ranks that form one learner: the processes of one process group, which train one model (DDP, FSDP2, HSDP).

The run sees one learner with one id. Rank 0 speaks for it. On the bus a fragment is always whole; one rank, its server,
gathers and serves it. docs/explanation/ranks.md gives the reasons.

| module | what it does |
|---|---|
| `topology` | finds the ranks of one learner and lets them meet; the only module that knows torch.distributed |
| `placement` | computes what each rank holds and sends, and which rank serves each fragment (pure) |
| `step_agreement` | encodes what the ranks tell each other at each step, and what rank 0 decides (pure) |
| `transport` | connects the ranks' exchange threads, for requests and vectors |
| `gather` | does one rank's share of the transfers, and compares replicas |
| `rank_carrier` | lets rank 0 direct the snapshots, uploads and pulls of all ranks |
| `rank_exchange` | is what a rank does alongside its training |
| `rank_learner` | is the training thread's side of a rank, and its exchange thread |
| `rank_folder` | saves and reads the moments of what each rank holds |
| `shard_broadcast` | passes the work-queue shards that rank 0 claims to all ranks, for `learner.batches` |
| `shutdown` | makes all ranks leave after the same step, and ends a rank that cannot |
"""
