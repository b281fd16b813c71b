"""A single-rank run spread over ranks: layouts and groups, the collectives, and what fills the models' seams. Imports nothing by itself.

| file | holds |
| --- | --- |
| groups | ParallelConfig, plan_layout, Groups and its axes; the rank-local default |
| collectives | the only caller of torch.distributed's collectives; stop flag, request hash |
| context, expert, guidance, decode | Ulysses and the shared refiner; MoE heads; guidance branches; decoder windows |
| lockstep | one decision about stopping; work of one rank for all, its errors too |
| apply | fills the seams of a loaded model |
| ranks | runs a script on N processes of this host, for tests and measurements |

Bit-equal to one rank: exchanges, decoder windows, what one rank encodes or decodes for all, and one rank with a process group. Bit-equal
among the ranks of a fleet: everything. The rest agrees to rounding: a matrix product of another height may sum another way.
"""
