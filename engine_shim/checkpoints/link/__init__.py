"""Moving KV blocks between engines and state daemons, in DéjàVu's layers (Table 1).

`stream_out`/`stream_in` know workers, ranks and the inference setup and find which part
of the cache goes where; they call `scatter`/`gather`, which turn non-contiguous pieces
(one per layer and block) into few contiguous chunks; those call `flush`/`fetch`, which
copy one contiguous chunk over a transport: shared memory on one host, ZeroMQ between
hosts. Nothing here imports torch or vLLM, and nothing is pickled.
"""
