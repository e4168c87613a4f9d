//! Processes that receive memory and saved contents from this one. The kernel tells which process asks: an id in a message
//! proves nothing.

use std::io::{self, ErrorKind};

use nix::errno::Errno;
use nix::unistd::geteuid;

use super::clients::Client;
use super::failures::PID;
use super::presence::Presence;
use sublet_protocol::identity::{MemberId, TenantName};
use sublet_protocol::run_dir::TenantDir;
use sublet_protocol::transport::{Connection, Peer};
use sublet_protocol::wire::{Failure, FailureKind};

/// Things that a process of another pid namespace does not get.
#[derive(Clone, Copy, Debug)]
pub(super) enum Given {
    Memory,
    Contents,
}

impl Presence {
    /// Refuses `what` to a process that is not of this pid namespace.
    pub(super) fn check_neighbour(&self, client: &Connection, what: Given) -> Result<(), Failure> {
        if client.is_neighbour().map_err(|error| not_seen(&error))? {
            return Ok(());
        }
        let (tenant, asks) = (self.tenant(), named(client.peer()));
        Err(FailureKind::Unknown.because(match what {
            Given::Memory => format!(
                "process {PID} of tenant {tenant} gives no memory to {asks}, which is not in its pid namespace: start \
                 both in one (docker run --pid=container:NAME)"
            ),
            Given::Contents => format!(
                "process {PID} of tenant {tenant} writes no saved contents for {asks}, which is not in its pid \
                 namespace: run sublet save {tenant} there (docker exec, kubectl exec)"
            ),
        }))
    }

    /// Refuses memory to a process that is not `importer`, the member of `dir` whose name it uses.
    pub(super) fn check_importer(
        &self,
        client: &mut Client,
        importer: MemberId,
        dir: Option<&TenantDir>,
        tenant: &TenantName,
    ) -> Result<(), Failure> {
        // A pause of our tenant would release memory under a process that is in no tenant of the family.
        let socket = dir.filter(|dir| dir.has_member(importer));
        let Some(socket) = socket.and_then(|dir| dir.socket_path(importer).ok()) else {
            return Err(no_process_of(importer, tenant));
        };
        if client.listens_at.as_ref() == Some(&socket) {
            return Ok(());
        }
        self.check_neighbour(&client.connection, Given::Memory)?;
        match client.connection.listens_at(&socket) {
            Ok(Ok(())) => {
                client.listens_at = Some(socket);
                Ok(())
            }
            // A process requests memory under the name of another process. It is a program of no tenant, or this is a
            // fault of Sublet. No memory was given. Start the program in the tenant that the message names.
            Ok(Err(member)) => Err(FailureKind::Unknown.because(format!(
                    "process {PID} gives no memory to {}: it asks as {importer} of tenant {tenant}, which is {}; start it \
                     in that tenant (sublet run --tenant {tenant})",
                    named(client.connection.peer()),
                    named(member)
                ))),
            Err(error)
                if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
            {
                Err(no_process_of(importer, tenant))
            }
            Err(error) => Err(not_seen(&error)),
        }
    }
}

/// A process requests memory, and is in no tenant that may have it. No memory was given. Start it with `sublet run
/// --tenant NAME`.
fn no_process_of(importer: MemberId, tenant: &TenantName) -> Failure {
    FailureKind::Unknown
        .because(format!("process {PID}: {importer} is no process of tenant {tenant}"))
}

fn named(peer: Peer) -> String {
    // Connections of other users are refused when they are made.
    format!("{peer} (user {})", geteuid())
}

/// The system did not say which process requests memory; its answer is in the brackets. No memory was given. Try
/// again. If descriptors are short, raise the limit (`ulimit -n`).
fn not_seen(error: &io::Error) -> Failure {
    let is_over_soon = error.raw_os_error() == Some(Errno::EAGAIN as i32);
    let kind = if is_over_soon { FailureKind::NotNow } else { FailureKind::Driver };
    kind.because(format!(
            "process {PID} cannot see who asks it for memory ({error}): ask again; where it has no descriptors left, raise its \
             limit of open files (ulimit -n)"
    ))
}
