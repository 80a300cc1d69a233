"""Batches under way: their files are checked, their lines answered by routers, in bounds."""
