"""Moving KV blocks between two processes, and proving it.

The reader pulls: nobody writes into a peer's memory. What a worker calls, from where, and
what it is promised; everything else is inside.

Both roles, on the event loop:

- ``endpoint.TransferEndpoint.open`` once the pool exists, ``close`` after servers and pair
  tables have stopped. One for each role of a process, so that what is read from never reads; it
  owns a transfer thread and the transports.
  ``thread.stuck_s`` says for how long that thread has been at one thing: a call into a
  library cannot be broken off, so a worker that reads too much there takes itself out of
  service. ``UndeadAgentError`` from whatever was awaited means that reads can be ended by the
  end of the process only, which has to follow.
- ``memory.PoolMemory``, which the worker implements over its pool (``HostMemory`` does for host
  memory): the transfer reads, writes and digests blocks by it alone, on the transfer thread.
  ``rank_pools.RankPools`` where several ranks have a pool each: blocks are whole there, and
  workers of any numbers of ranks are pairs whose heads divide by them.
  The worker keeps a block from every other writer while it is leased, being pulled into, or
  quarantined; nothing here knows the pool's books. Where its device is lost, what was asked of
  it fails like any other read, and ``lost`` says that the process has to end. A pool on a device
  is ``memory.DeviceCopies`` as well.
- ``memory.ScratchBlocks``: blocks that no sequence has, for the probes of pairs.

A source (a prefill worker), on the event loop; nothing of it waits:

- ``source.lease_table.LeaseTable``: ``open`` with blocks that the caller holds; ``announce``
  after each step whose KV is complete *on the device*; ``grant`` a ticket to one reader, which
  revokes the one before; ``close`` before the blocks are freed. From ``close`` on no reader is
  confirmed anything. Digests are taken of what was announced, on the transfer thread.
- ``source.servicer.KVSourceServicer`` on the worker's gRPC server: Connect and Fetch.

A reader (a decode worker), on the event loop:

- ``reader.pairs.PairTable``: ``run`` in a task group keeps one pair to each source that
  ``set_peers`` named, proven over the best transport that works; ``pairs`` is for Watch.
- ``PairTable.open_pull``, then ``LeasePull.run`` by one task: returns once the blocks are proven,
  that is, the source confirmed after the reads that its lease never lapsed and none of its
  blocks was reused, and coverage, the prompt and the digests agree; or raises ``PullError``.
  Cancelling the task, or ``abandon`` (synchronous), ends it at any moment.
- Of each block only its first bytes are written: what the sequence needs of it to go on
  (``diptych.block_needs``, from the groups of layers in the layout). The worker must know.
- ``on_quarantine(block_ids)`` comes before a pull that has ended is over for the caller, for
  blocks that posted reads may still write; ``on_quarantine_end`` exactly once for each of them,
  when the read is over or its agent is gone, however long that takes. Only then may the
  worker hand such a block out again.

The rooms, each of which knows only those below it; ``source`` and ``reader`` meet on the wire
alone:

- ``source``, ``reader``: the two sides. Pure machines (``lease_table``, ``fetch_machine``,
  ``pull_machine``, ``quarantine``), and the shells around them.
- ``endpoint``: an end of transfers, of one role.
- ``transports``: what moves bytes, behind one seam (``transports.base``): ``inline`` in the Fetch
  stream; ``child``, an agent in a process of its own; ``inside``, one inside the worker;
  ``staged``, one of those through host memory beside a pool on a device. An agent reads one
  pool: ``rank_transports`` makes those of all ranks one, and plans what each reads.
  ``choice`` has the table of them, ``lanes`` the ways that each library may take, ``ways`` those
  between two pools. The transfer thread, on which all of them are called, is here as well.
- ``agents``: what runs in an agent's process, on its one thread. It loads nothing of gRPC, torch
  or the settings; the worker talks to it by ``agents.wire``. A new library goes here.
- ``config``, ``memory``, ``rank_pools``, ``block_shares``, ``digest``, ``host_sums``, ``errors``,
  ``first_done``: the ground.
- ``testing``: faults and canaries, for workers that are told to allow them.
"""
