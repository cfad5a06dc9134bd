"""How the KV of requests and the weights of models share a node's port: nodes keep to it, and the
planner reckons with it."""

SERVING_PARTS = 9
"""How many parts of a port the KV of all requests gets for one part of any model's weights. (Halves
doubled the time of KV beside weights; and if KV always went first, it could stop a load that is to
relieve its node.)"""
WEIGHTS_LEAST = 1 / (SERVING_PARTS + 1)
"""The share of a port that the weights of a model get beside KV in any case: by so much loading may
slow serving."""
