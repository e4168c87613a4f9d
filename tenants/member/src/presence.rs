//! A process in the run directory: its identity, the name of its socket, and its neighbours of the same tenant.
//!
//! Lock order: `new_name` is a leaf.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_pool::sync::lock;

use super::config::{JoinError, MemberConfig};
use sublet_protocol::identity::{FamilyName, MemberId, TenantName};
use sublet_protocol::run_dir::{RunDir, RunDirError, SOCKET_EXTENSION, TenantDir};
use sublet_protocol::transport::Listener;

/// The time within which every process makes its name again, after one process has: busy machines need longer.
pub(super) const NAMES_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// The place of a process in the run directory: see the head of this module.
#[derive(Debug)]
pub struct Presence {
    id: MemberId,
    config: MemberConfig,
    dir: TenantDir,
    socket_path: PathBuf,
    /// Is the process at its end, so that a removed name is not made again?
    has_left: AtomicBool,
    /// The time when its name was last made again.
    new_name: Mutex<Option<Instant>>,
}

impl Presence {
    /// Listens in the tenant's directory, under a new identity.
    pub(super) fn begin(config: MemberConfig) -> Result<(Self, Listener), JoinError> {
        let what = "a random identity";
        let id = random_id().map_err(|source| JoinError::System { what, source })?;
        let (dir, listener) = config.run_dir.listen(&config.tenant, id)?;
        let socket_path = dir.socket_path(id)?;
        let (has_left, new_name) = (AtomicBool::new(false), Mutex::default());
        Ok((Self { id, config, dir, socket_path, has_left, new_name }, listener))
    }

    /// The process's identity.
    pub fn id(&self) -> MemberId {
        self.id
    }

    /// Its tenant.
    pub fn tenant(&self) -> &TenantName {
        &self.config.tenant
    }

    /// The process's settings.
    pub fn config(&self) -> &MemberConfig {
        &self.config
    }

    /// The family that the process names.
    pub fn family(&self) -> Option<&FamilyName> {
        self.config.family.as_ref()
    }

    /// The directory of all tenants.
    pub fn run_dir(&self) -> &RunDir {
        &self.config.run_dir
    }

    /// The directory of its tenant.
    /// The directory of the process's tenant.
    pub fn dir(&self) -> &TenantDir {
        &self.dir
    }

    /// The socket of the process's agent.
    pub fn socket_path(&self) -> &Path {
        &self.socket_path
    }

    /// The path at which the agent of `member`, of the same tenant, would listen. All identities are of one length, so this
    /// path fits if the own one did.
    pub fn socket_path_of(&self, member: MemberId) -> PathBuf {
        self.socket_path.with_file_name(format!("{member}.{SOCKET_EXTENSION}"))
    }

    /// Is the process at its end?
    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::SeqCst)
    }

    /// Records that the process is at its end. Its name stays until it is removed, and is not made again after that.
    pub(super) fn leave(&self) {
        self.has_left.store(true, Ordering::SeqCst);
    }

    pub(super) fn remove_name(&self) {
        if let Err(error) = std::fs::remove_file(&self.socket_path) {
            tracing::debug!(%error, "the socket was gone already");
        }
    }

    /// Makes the socket's name again after it was removed.
    pub(super) fn listen_again(&self) -> Result<Listener, RunDirError> {
        let listener = self.run_dir().listen_again(self.tenant(), self.id)?;
        *lock(&self.new_name) = Some(Instant::now());
        Ok(listener)
    }

    /// Are the names of all processes in their places, as far as the own name shows?
    pub(super) fn names_stay(&self) -> bool {
        let new_name = *lock(&self.new_name);
        let all_had_time = new_name.is_none_or(|since| since.elapsed() > NAMES_AGAIN_AFTER);
        all_had_time && (self.has_left() || self.dir.has_member(self.id))
    }

    /// The number of processes of the tenant, including this one.
    pub fn members(&self) -> u64 {
        self.dir.members().map_or(1, |members| members.len().max(1) as u64)
    }
}

fn random_id() -> std::io::Result<MemberId> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(MemberId(u64::from_le_bytes(bytes)))
}
