"""How a call is run, once :mod:`dmattn.problem` has seen what it asks: from the public functions down to the device code."""
