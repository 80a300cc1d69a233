"""What the prefill and the decode worker share: configuration, loading, liveness, Watch.

Knows neither role's service nor kvtransfer: the roles put the parts together.
"""
