"""Code that learners and the syncer share: wire messages, codecs, key names, and the bus between them."""
