"""Convert an ASTuner experiment to the configuration of the engine under a backbone.

`facts` collects inputs from outside the experiment file, `table` converts ``astuner.*`` keys, `keys` reads the engine's
own keys that users write, `gpu_memory` estimates GPU memory, and `gpu_diagnosis` checks the machine.  These modules
import no engine: each backbone describes its engine's keys itself.
"""
