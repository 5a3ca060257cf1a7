"""The back ends of attention on a device, of which one prefills and one decodes."""
