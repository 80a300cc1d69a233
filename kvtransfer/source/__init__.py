"""The side that is read: leases, what was announced of them, KVSource."""
