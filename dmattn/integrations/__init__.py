"""Ways into other libraries. Each module imports its library; importing dmattn imports none of them."""
