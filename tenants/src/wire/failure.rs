//! Why a request was not carried out.

use serde::{Deserialize, Serialize, Serializer};

use crate::code::Code;

/// Why a request was not carried out, by what the asker can do about it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What kind.
    pub kind: FailureKind,
    /// One sentence: operation, object, size, device, code, next step.
    pub message: String,
}

/// A failure as people's programs read it.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct ShownFailure<'a> {
    /// Why, in one word.
    code: Code,
    /// Of a GPU that is too full: how much more must be free.
    missing_bytes: Option<u64>,
    /// Why, in words.
    message: &'a str,
}

impl Serialize for Failure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { kind, message } = self;
        if !serializer.is_human_readable() {
            return (kind, message).serialize(serializer);
        }
        let missing_bytes = kind.missing_device_bytes();
        ShownFailure { code: (*kind).into(), missing_bytes, message }.serialize(serializer)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Failure {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Failure".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        ShownFailure::json_schema(generator)
    }
}

/// The kinds of [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FailureKind {
    /// A stream is being captured: try again when the capture has ended.
    InCapture,
    /// The ranks did not reach a common cut in time.
    CutNotReached,
    /// The devices did not finish, or calls did not return, in time.
    DrainTimeout,
    /// The host cannot hold the contents, in its memory or on its disk.
    OutOfHostMemory,
    /// The device cannot hold the tenant now.
    OutOfDeviceMemory {
        /// How much more must be free.
        missing_bytes: u64,
    },
    /// Not possible in the state the process is in.
    WrongState,
    /// Another process that was needed is gone or silent.
    PeerGone,
    /// The application did not ask for the action in time.
    NoConsent,
    /// It was under way, and is no longer wanted: something failed elsewhere.
    CalledOff,
    /// Not while the process is paused, or being paused: ask again when it runs.
    NotNow,
    /// Other processes hold some of the memory: all must take part.
    Shared,
    /// Processes of other tenants have some of the memory open.
    Lent,
    /// The tenant that the memory is borrowed from is paused: that one must be resumed first.
    LenderAway,
    /// The request names something this process does not have.
    Unknown,
    /// The driver failed, or the disk that saved contents are on.
    Driver,
    /// Something was lost; the process should be ended.
    Faulted,
    /// The device could not hold the tenant even if what is to make room for it were away.
    DoesNotFit {
        /// How much more must be free.
        missing_bytes: u64,
    },
}

impl FailureKind {
    /// How much more device memory must be free, where that is why.
    pub(crate) fn missing_device_bytes(self) -> Option<u64> {
        if let Self::OutOfDeviceMemory { missing_bytes } | Self::DoesNotFit { missing_bytes } = self
        {
            Some(missing_bytes)
        } else {
            None
        }
    }
}

impl From<FailureKind> for Code {
    fn from(kind: FailureKind) -> Self {
        match kind {
            FailureKind::InCapture => Self::InCapture,
            FailureKind::CutNotReached | FailureKind::DrainTimeout => Self::NotInTime,
            FailureKind::OutOfHostMemory => Self::HostFull,
            FailureKind::OutOfDeviceMemory { .. } | FailureKind::DoesNotFit { .. } => Self::GpuFull,
            FailureKind::PeerGone => Self::NoAnswer,
            FailureKind::NoConsent => Self::NoConsent,
            FailureKind::CalledOff => Self::CalledOff,
            FailureKind::WrongState | FailureKind::NotNow | FailureKind::Unknown => {
                Self::WrongState
            }
            FailureKind::Shared | FailureKind::Lent | FailureKind::LenderAway => Self::Shared,
            FailureKind::Driver => Self::Driver,
            FailureKind::Faulted => Self::Lost,
        }
    }
}
