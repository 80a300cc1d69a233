"""What workers share whatever their roles: configuration, loading, liveness, Watch.

Knows no role's service: those put themselves around the engine, and `roles` puts them together.
"""
