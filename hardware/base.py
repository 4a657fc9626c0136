"""Every question about a device has one answer: its platform.

Nothing outside `hardware/` branches on a device's name. Torch is imported by the platforms'
own files when a method needs it, never to list or detect what is there without it.
"""
