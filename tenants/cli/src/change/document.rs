//! The outcome of changes to tenants, for programs. `docs/sublet.schema.json` describes it.

use serde::Serialize;
use sublet_turns::Switched;
use tenants::code::Code;
use tenants::coordinator::{DeviceShortage, MemberFailure, Outcome, Report, Trouble};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use vmm_pool::PinnedBytes;

use crate::outsiders::{self, Occupant, Outside};

/// A GPU that is too full, and the processes with the most memory on it.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct Shortage<'a> {
    #[serde(flatten)]
    device: &'a DeviceShortage,
    processes: Vec<Occupant>,
}

impl<'a> Shortage<'a> {
    fn of(device: &'a DeviceShortage) -> Self {
        Self { device, processes: outsiders::largest_on(&device.uuid) }
    }
}

/// The report of one tenant for programs.
#[derive(Default, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Half"))]
pub(crate) struct Document<'a> {
    tenant: &'a str,
    outcome: &'static str,
    /// Device memory that a pause gave back.
    freed_bytes: u64,
    /// Device memory that a resume took.
    taken_bytes: u64,
    wall_us: Option<u64>,
    report: Option<&'a Report>,
    /// The tenants that were paused to make room, by a resume that queued. `reasons` says why, one line each.
    paused: Vec<&'a str>,
    reasons: &'a [String],
    /// It is done and not written down for later switches, and why not.
    unrecorded: Option<&'a str>,
    /// Device memory that stays, and was to make room for others.
    stayed_bytes: u64,
    /// Of these, how much for which cause.
    stays: &'a [PinnedBytes],
    /// Processes that the job started without Sublet: a pause does not reach their memory.
    strayed: &'a [Outside],
    error: Option<String>,
    /// Why, in one word.
    code: Option<Code>,
    /// The members that did not do their part, where that is why.
    failures: &'a [MemberFailure],
    missing_device_bytes: Option<u64>,
    shortages: Vec<Shortage<'a>>,
    retryable: bool,
    unchanged: bool,
}

/// Several tenants, one after the other.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Changes<'a> {
    pub(super) changes: Vec<Document<'a>>,
}

/// The report of a swap for programs.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct SwapDocument<'a> {
    outcome: &'static str,
    /// Of both halves together.
    wall_us: Option<u64>,
    /// The tenant that was to leave; none where it was not asked.
    paused: Option<Document<'a>>,
    /// The tenant that was to come; none where it was not asked.
    resumed: Option<Document<'a>>,
    error: Option<String>,
    code: Option<Code>,
}

impl<'a> SwapDocument<'a> {
    /// Creates the document of the halves that were tried. The reason for a failure is the resume's error, or else the pause's.
    pub(super) fn new(
        paused: Option<Document<'a>>,
        resumed: Option<Document<'a>>,
        wall_us: Option<u64>,
    ) -> Self {
        let failed = || [&resumed, &paused].into_iter().flatten().find(|half| half.error.is_some());
        let (error, code) = failed().map_or((None, None), |half| (half.error.clone(), half.code));
        let outcome = if error.is_some() { "failed" } else { "completed" };
        Self { outcome, wall_us, paused, resumed, error, code }
    }
}

impl<'a> Document<'a> {
    pub(crate) fn new(tenant: &'a TenantName, result: &'a Result<Outcome, Trouble>) -> Self {
        let mut document = Self {
            tenant: tenant.as_str(),
            outcome: "completed",
            unchanged: true,
            ..Self::default()
        };
        if let Ok(outcome) = result {
            document.stays = outcome.stays();
            document.stayed_bytes = PinnedBytes::total_bytes(document.stays);
        }
        match result {
            Ok(Outcome::Completed(report)) => {
                document.tell(report);
                document.unchanged = false;
                if report.is_partial() {
                    document.outcome = "partial";
                }
            }
            Ok(Outcome::AlreadyPaused { stays }) if !stays.is_empty() => {
                document.outcome = "partial";
            }
            Ok(Outcome::AlreadyPaused { .. }) => document.outcome = "already_paused",
            Ok(Outcome::AlreadyActive) => document.outcome = "already_active",
            Err(error) => {
                document.fail(error);
            }
        }
        document
    }

    /// Adds processes of the job that run outside Sublet.
    pub(super) fn with_strayed(self, strayed: &'a [Outside]) -> Self {
        let outcome = if strayed.is_empty() { self.outcome } else { "partial" };
        Self { outcome, strayed, ..self }
    }

    fn tell(&mut self, report: &'a Report) {
        self.freed_bytes = report.freed_bytes;
        self.taken_bytes = report.taken_bytes;
        self.wall_us = Some(report.wall_us);
        self.report = Some(report);
    }

    fn fail(&mut self, trouble: &'a Trouble) {
        self.outcome = "failed";
        self.error = Some(chain(trouble));
        self.code = Some(trouble.into());
        self.failures = trouble.failures();
        self.missing_device_bytes = trouble.missing_device_bytes();
        self.shortages = trouble.shortages().iter().map(Shortage::of).collect();
        self.retryable = trouble.is_retryable();
        self.unchanged = trouble.left_unchanged();
    }

    /// Creates the document of a resume that queued.
    pub(super) fn queued(tenant: &'a TenantName, result: &'a Result<Switched, Trouble>) -> Self {
        let mut document = Self::new(tenant, &Ok(Outcome::AlreadyActive));
        match result {
            Ok(Switched { changes, unrecorded, .. })
                if matches!(changes.last(), Some((_, Outcome::AlreadyActive))) =>
            {
                document.unrecorded = unrecorded.as_deref();
            }
            Ok(Switched { victims, reasons, changes, unrecorded, .. }) => {
                document.outcome = "completed";
                document.unrecorded = unrecorded.as_deref();
                let report = changes.iter().rev().find_map(|(_, outcome)| match outcome {
                    Outcome::Completed(report) => Some(&**report),
                    Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => None,
                });
                if let Some(report) = report {
                    document.tell(report);
                }
                document.paused = victims.iter().map(TenantName::as_str).collect();
                document.reasons = reasons;
                document.unchanged = false;
            }
            Err(error) => {
                document.fail(error);
            }
        }
        document
    }
}
