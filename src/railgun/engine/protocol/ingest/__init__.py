"""Track the streams that outside programs push into a flow: their owner, their position, what may be acknowledged.

Three pure machines: the *table* of a worker, the *registry* of the controller, and the *sender* of a connector. Their
one aim: every committed snapshot holds, of every stream, exactly its first messages, each once; and a stream can always
go on.
"""
