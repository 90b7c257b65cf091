"""FLOPs, bytes and seconds of compiled programs and of jaxprs."""
