"""The back ends of paged attention on a device, of which one prefills and one decodes."""
