"""What the gateway costs: the time that it adds to a request, and its processor time and memory for
streams, beside a bare HTTP server of the same library."""
