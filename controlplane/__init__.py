"""The control plane: the store, the push, and the admin door."""
