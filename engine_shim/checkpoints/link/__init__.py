"""Moving KV blocks between engines and state daemons, in DéjàVu's layers (Table 1).

`scatter` and `gather` turn non-contiguous pieces (one per layer and block) into few
contiguous chunks and back; they call `flush` and `fetch`, which copy one contiguous chunk
over a transport: shared memory on one host, ZeroMQ between hosts. Nothing here imports
torch or vLLM, and nothing is pickled.
"""
