"""What runs when an overridden operator is called: a recorded plan, a host function in Python, or ATen's kernel."""
