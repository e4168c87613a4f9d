//! Keys, as a terminal sends them. Read here and not by the terminal library, whose reader never comes back once the terminal
//! is gone, or once half a sequence has come.

use std::io;
use std::os::fd::AsFd as _;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::read;

/// The keys that mean something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Leave,
    Help,
    Escape,
    Up,
    Down,
    Left,
    Right,
}

/// What came from a terminal.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    Keys(Vec<Key>),
    /// There is no terminal any more.
    Gone,
}

/// What is pressed within `tick`; returns early if a key or a signal comes.
pub(super) fn within(tick: PollTimeout, terminal: &io::Stdin) -> io::Result<Input> {
    let mut polled = [PollFd::new(terminal.as_fd(), PollFlags::POLLIN)];
    let mut bytes = [0; 256];
    let count = match poll(&mut polled, tick) {
        Ok(0) => return Ok(Input::Keys(Vec::new())),
        Ok(_) => read(terminal, &mut bytes),
        Err(errno) => Err(errno),
    };
    match count {
        Ok(0) | Err(Errno::EIO) => Ok(Input::Gone),
        Ok(count) => Ok(Input::Keys(keys(&bytes[..count]))),
        Err(Errno::EINTR | Errno::EAGAIN) => Ok(Input::Keys(Vec::new())),
        Err(errno) => Err(errno.into()),
    }
}

/// Keys in what one read gave. A sequence that it does not end is none.
fn keys(bytes: &[u8]) -> Vec<Key> {
    let mut found = Vec::new();
    let mut rest = bytes;
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        found.extend(match (first, behind) {
            // In raw mode the terminal turns Ctrl-C into no signal.
            (b'q' | 0x03, _) => Some(Key::Leave),
            (b'?', _) => Some(Key::Help),
            (0x1b, [b'[' | b'O', sequence @ ..]) => {
                let parameters = sequence.iter().take_while(|byte| !(0x40..0x7f).contains(*byte));
                let end = parameters.count();
                rest = sequence.get(end + 1..).unwrap_or_default();
                sequence.get(end).copied().and_then(arrow)
            }
            (0x1b, _) => Some(Key::Escape),
            _ => None,
        });
    }
    found
}

fn arrow(last: u8) -> Option<Key> {
    match last {
        b'A' => Some(Key::Up),
        b'B' => Some(Key::Down),
        b'C' => Some(Key::Right),
        b'D' => Some(Key::Left),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_of_terminals_are_keys_and_what_is_cut_short_is_none() {
        let both = keys(b"\x1b[A\x1bOB\x1b[1;5C\x1b[D?q");
        assert_eq!(both, [Key::Up, Key::Down, Key::Right, Key::Left, Key::Help, Key::Leave]);
        assert_eq!(keys(b"\x1b"), [Key::Escape]);
        assert_eq!(keys(b"\x03"), [Key::Leave]);
        for nothing in [&b""[..], b"\x1b[", b"\x1b[1;5", b"\x1b[5~", b"x\xc3\xa9", b"\x1b[q"] {
            assert_eq!(keys(nothing), [], "{nothing:?}");
        }
    }
}
