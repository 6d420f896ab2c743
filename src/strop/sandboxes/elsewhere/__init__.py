"""Sandboxes of other systems, behind the protocol of the local ones: adapters over their official SDKs or programs."""
