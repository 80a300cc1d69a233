"""A cluster without models and machines: discrete events around the code that decides.

Placement and the waiting room are the router's own, and scheduler, block pool and prefix cache
the workers' own; how long a step takes comes from a worker's learned step model. What is between
them (messages, transfers, a request's life) is a simple model of its own.
"""
