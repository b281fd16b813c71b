"""A single-rank run spread over ranks: layouts and groups, the collectives, and what fills the models' seams. Imports nothing by itself."""
