//! The numbers of the agent's sockets, for a forked child to close: as long as it holds them, nobody is refused
//! and nobody sees a connection end when this process has ended.

use std::os::fd::{AsFd, AsRawFd as _, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Connections one agent keeps: peers on a node and a few commands fit. When all are taken, a new one
/// takes the place of the one that has been idle longest, and that one's owner connects again when it next asks
/// something. One whose question is not answered yet never goes: when there is no other, new ones wait in the
/// listening socket's queue.
pub const CONNECTIONS_MAX: usize = 256;
/// Stands where there is no socket.
const NONE: RawFd = -1;
/// In addition to connections: the listening socket, and the one that takes its place.
const OTHERS: usize = 2;

/// Numbers of open sockets. No lock: a fork may come at any instant, on any thread.
#[derive(Debug)]
pub(super) struct Sockets(Box<[AtomicI32]>);

/// A socket that a child would close. Dropped before the socket is: its number may then become another's.
#[derive(Debug)]
pub(super) struct Noted(Option<(Arc<Sockets>, usize)>);

impl Default for Sockets {
    fn default() -> Self {
        Self((0..CONNECTIONS_MAX + OTHERS).map(|_| AtomicI32::new(NONE)).collect())
    }
}

impl Sockets {
    /// Notes the number of `socket`. Called by the agent alone.
    pub(super) fn note(self: &Arc<Self>, socket: &impl AsFd) -> Noted {
        let free = self.0.iter().position(|number| number.load(Ordering::Relaxed) == NONE);
        if let Some(index) = free {
            self.0[index].store(socket.as_fd().as_raw_fd(), Ordering::Relaxed);
        }
        Noted(free.map(|index| (Arc::clone(self), index)))
    }

    /// Closes them all, in a forked child: there, no thread has any further use for them.
    pub(super) fn close_in_child(&self) {
        for number in &self.0 {
            let socket = number.swap(NONE, Ordering::Relaxed);
            if socket != NONE {
                // It was open at the fork, and this is the only thread.
                let _closed = nix::unistd::close(socket);
            }
        }
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some((sockets, index)) = &self.0 {
            sockets.0[*index].store(NONE, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_sockets_that_are_gone_are_used_again() {
        let sockets = Arc::new(Sockets::default());
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut noted: Vec<_> = (0..=sockets.0.len()).map(|_| sockets.note(&file)).collect();
        assert!(noted.pop().unwrap().0.is_none(), "more places than there are");
        noted.remove(3);
        assert_eq!(sockets.note(&file).0.as_ref().unwrap().1, 3);
        drop(noted);
        assert!(sockets.0.iter().all(|number| number.load(Ordering::Relaxed) == NONE));
    }

    #[test]
    fn what_is_noted_is_closed_once() {
        let sockets = Arc::new(Sockets::default());
        let (ours, theirs) = nix::unistd::pipe().unwrap();
        let noted = sockets.note(&theirs);
        let _its_number_is_closed_by_hand = std::os::fd::IntoRawFd::into_raw_fd(theirs);
        sockets.close_in_child();
        assert_eq!(nix::unistd::read(&ours, &mut [0]), Ok(0), "the writing end is open");
        sockets.close_in_child();
        drop(noted);
    }
}
