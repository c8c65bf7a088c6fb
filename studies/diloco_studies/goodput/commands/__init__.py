"""`diloco simulate`: its commands, tables and pictures."""
