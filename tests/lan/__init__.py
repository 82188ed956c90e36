"""A local network that exists in memory only, with a clock that jumps from event to event.

The real machines of :mod:`mingle.protocol` run in it (:class:`~mingle.protocol.member.Joiner` and others),
and their messages travel as the real bytes; what is simulated is all that lies outside them:

* :mod:`tests.lan.world`: the clock, the seeded dice and the heap of events;
* :mod:`tests.lan.network`: machines, interfaces, segments, who reaches whom, datagrams lost and doubled;
* :mod:`tests.lan.tcp`: connections: ordered, refused, silent, cut, healed;
* :mod:`tests.lan.process`: one process as the driver of one machine: killed, stopped, continued;
* :mod:`tests.lan.processor`: what work takes, where it shall take time;
* :mod:`tests.lan.invariants`: what must hold after every step;
* :mod:`tests.lan.gathering`: whole jobs in a few lines;
* :mod:`tests.lan.schedules`: random schedules from a seed.

``python -m tests.lan`` runs a scenario and prints figures, or replays one seed.
"""
