"""Messages between the supervisor and its processes arrive whole, in order, and with their own descriptors."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from headway.launch.channel import Channel

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Channel.pair()
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_in_order_with_what_text_an_environment_may_hold(pair: Pair) -> None:
    ours, theirs = pair
    messages = [{"a": 1}, {}, {"text": "ünï\udcff\0\n"}]
    for message in messages:
        assert ours.send(message)
    assert [theirs.receive() for _ in messages] == [(message, []) for message in messages]


def test_each_message_comes_with_its_own_descriptors(pair: Pair) -> None:
    ours, theirs = pair
    pipes = [os.pipe() for _ in range(3)]
    ours.send({"n": 0})
    for number, (read, _) in enumerate(pipes):
        ours.send({"n": number}, [read])
        ours.send({"n": number, "guard": []})
    assert theirs.receive() == ({"n": 0}, [])
    for number, (_, write) in enumerate(pipes):
        message, [fd] = theirs.receive()
        assert theirs.receive()[1] == []
        os.write(write, b"%d" % number)
        assert (message["n"], os.read(fd, 9)) == (number, b"%d" % number)
        assert not os.get_inheritable(fd)
        os.close(fd)
    for fds in pipes:
        for fd in fds:
            os.close(fd)


def test_a_channel_that_is_closed_keeps_no_descriptor_of_a_message_that_nobody_took(pair: Pair) -> None:
    ours, theirs = pair
    read, write = os.pipe()
    os.set_blocking(read, False)
    ours.send({"n": 0}, [write])
    ours.send({"n": 1}, [write])
    os.close(write)
    message, [fd] = theirs.receive()
    assert message == {"n": 0}
    os.close(fd)
    theirs.close()
    assert os.read(read, 9) == b""  # else somebody could still write
    os.close(read)


def test_a_message_larger_than_the_socket_arrives_whole(pair: Pair) -> None:
    ours, theirs = pair
    message = {"text": "x" * 5_000_000}
    sender = threading.Thread(target=ours.send, args=[message])
    sender.start()
    assert theirs.receive() == (message, [])
    sender.join()


def test_what_has_arrived_is_had_without_waiting_and_the_end_is_seen(pair: Pair) -> None:
    ours, theirs = pair
    assert theirs.arrived() == ([], True)
    ours.send({"a": 1})
    ours.send({"b": 2})
    assert theirs.arrived() == ([{"a": 1}, {"b": 2}], True)
    ours.send({"last": "words"})
    ours.close()
    assert theirs.arrived() == ([{"last": "words"}], False)
    assert not theirs.send({"a": 1})
    with pytest.raises(EOFError):
        theirs.receive()


def test_half_a_message_of_a_process_that_died_is_no_message(pair: Pair) -> None:
    ours, theirs = pair
    os.write(ours.fileno(), b"\x20\0\0\0\0\0\0\0{")
    ours.close()
    assert theirs.arrived() == ([], False)


def test_a_process_is_given_one_end_and_its_own_children_have_none() -> None:
    ours, theirs = Channel.pair()
    program = (
        "import os, sys; from headway.launch.channel import Channel; channel = Channel.from_fd(int(sys.argv[1]));"
        "channel.send({'inheritable': os.get_inheritable(channel.fileno()), 'got': channel.receive()[0]})"
    )
    fd = theirs.fileno()
    child = subprocess.Popen([sys.executable, "-c", program, str(fd)], pass_fds=[fd])
    theirs.close()
    ours.send({"a": 1})
    assert ours.receive()[0] == {"inheritable": False, "got": {"a": 1}}
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()
    assert child.wait() == 0
