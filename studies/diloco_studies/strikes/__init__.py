"""`diloco chaos`: kills, pauses and cuts of a real run, and what it keeps of its promises."""
