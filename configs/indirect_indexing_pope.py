task = 'indirect_indexing'
pe = 'pope'
