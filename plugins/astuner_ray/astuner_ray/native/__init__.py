"""What a backbone tells the engine underneath: a whole configuration of somebody else's trainer, made from ours.

`facts` is what it depends on beside the experiment file, `table` reads what our keys become, `keys` what the person
wrote in the engine's own words, `gpu_memory` says what all of it will take of a GPU, and `gpu_diagnosis` what the
machine must have for it.  Light: an engine is asked about its own keys by the backbone that knows it.
"""
