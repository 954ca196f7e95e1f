"""HTTP/1.1 on a socket, below the server that answers and the tier that asks: whose memory bytes are received into, heads of
answers."""
