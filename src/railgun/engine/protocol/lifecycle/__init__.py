"""The lifecycle of a flow: start, run, rescale, save, stop, recover."""
