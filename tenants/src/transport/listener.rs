//! The socket that a process is reached at.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use vmm_pool::Uninherited;

use super::{Connection, Peer, TransportError};

/// Of a name in the making; as long as that of a socket, so that both fit a socket path or neither does.
pub(crate) const BINDING_EXTENSION: &str = "bind";

/// A listening socket. Dropping it leaves its name behind, because a forked child drops its copy too;
/// [`Listener::close`] removes the name, and a name without a listener is removed by the next that meets it.
#[derive(Debug)]
pub struct Listener {
    socket: Uninherited<UnixListener>,
    path: PathBuf,
    /// Device and inode of the name.
    inode: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`. The name appears only when connections are taken, so a peer that is refused
    /// knows that nobody will ever answer there.
    ///
    /// # Errors
    /// [`TransportError::Bind`], also when the name exists or is too long.
    pub fn bind(path: &Path) -> Result<Self, TransportError> {
        let failed = |source| TransportError::Bind { path: path.to_owned(), source };
        if fs::symlink_metadata(path).is_ok() {
            return Err(failed(ErrorKind::AddrInUse.into()));
        }
        let binding = path.with_extension(BINDING_EXTENSION);
        let socket = UnixListener::bind(&binding).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let inode = inode(&binding);
        fs::rename(&binding, path).map_err(failed)?;
        Ok(Self { socket: socket.into(), path: path.to_owned(), inode })
    }

    /// Does its name still lead to it? Otherwise it was removed, perhaps with all that was around it.
    pub fn is_named(&self) -> bool {
        self.inode.is_some() && inode(&self.path) == self.inode
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection, if somebody waits; checks that it is of our user. Does not block.
    ///
    /// # Errors
    /// [`TransportError::ForeignPeer`] and [`TransportError::Io`]; the listener stays usable.
    pub fn accept(&self) -> Result<Option<Connection>, TransportError> {
        loop {
            match self.socket.accept() {
                Ok((stream, _address)) => return Connection::accepted(stream).map(Some),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(source) => {
                    let peer = Peer { pid: None };
                    return Err(TransportError::Io { operation: "accept", peer, source });
                }
            }
        }
    }

    /// Ends listening and removes the name.
    ///
    /// # Errors
    /// What the system returned; a name that is gone already is no error.
    pub fn close(self) -> std::io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}
