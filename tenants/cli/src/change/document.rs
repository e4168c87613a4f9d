//! What became of tenants, for programs. `docs/sublet.schema.json` describes it.

use serde::Serialize;
use tenants::code::Code;
use tenants::coordinator::{CoordinatorError, DeviceShortage, MemberFailure, Outcome, Report};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::switching::{SwitchError, Switched};

use crate::outsiders::{self, Occupant};

/// A GPU that is too full, and the processes with the most memory on it.
#[derive(Serialize)]
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
#[derive(Serialize)]
pub(crate) struct Document<'a> {
    tenant: &'a str,
    outcome: &'static str,
    report: Option<&'a Report>,
    /// Who was paused to make room, by a resume that queued, and why, one line each.
    paused: Vec<&'a str>,
    reasons: &'a [String],
    /// It is done and not written down for later switches, and why not.
    unrecorded: Option<&'a str>,
    stayed_bytes: u64,
    error: Option<String>,
    /// Why, in one word.
    code: Option<Code>,
    /// Who did not do its part, where that is why.
    failures: &'a [MemberFailure],
    missing_device_bytes: Option<u64>,
    shortages: Vec<Shortage<'a>>,
    retryable: bool,
    unchanged: bool,
}

/// The report of a swap for programs: the tenant that was paused, then the one that was resumed, or the one that ended it.
#[derive(Serialize)]
pub(super) struct Halves<'a> {
    pub(super) halves: Vec<Document<'a>>,
}

impl<'a> Document<'a> {
    pub(crate) fn new(
        tenant: &'a TenantName,
        result: &'a Result<Outcome, CoordinatorError>,
    ) -> Self {
        let mut document = Self {
            tenant: tenant.as_str(),
            outcome: "completed",
            report: None,
            paused: Vec::new(),
            reasons: &[],
            unrecorded: None,
            stayed_bytes: result.as_ref().map_or(0, Outcome::stayed_bytes),
            error: None,
            code: None,
            failures: &[],
            missing_device_bytes: None,
            shortages: Vec::new(),
            retryable: false,
            unchanged: true,
        };
        match result {
            Ok(Outcome::Completed(report)) => {
                document.report = Some(report);
                document.unchanged = false;
            }
            Ok(Outcome::AlreadyPaused { .. }) => document.outcome = "already_paused",
            Ok(Outcome::AlreadyActive) => document.outcome = "already_active",
            Err(error) => {
                document.outcome = "failed";
                document.error = Some(chain(error));
                document.code = Some(error.into());
                document.failures = error.failures();
                document.missing_device_bytes = error.missing_device_bytes();
                document.shortages = error.shortages().iter().map(Shortage::of).collect();
                document.retryable = error.is_retryable();
                document.unchanged = error.left_unchanged();
            }
        }
        document
    }

    /// Of a resume that queued.
    pub(super) fn queued(
        tenant: &'a TenantName,
        result: &'a Result<Switched, SwitchError>,
    ) -> Self {
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
                document.report = changes.iter().rev().find_map(|(_, outcome)| match outcome {
                    Outcome::Completed(report) => Some(&**report),
                    Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => None,
                });
                document.paused = victims.iter().map(TenantName::as_str).collect();
                document.reasons = reasons;
                document.unchanged = false;
            }
            Err(error) => {
                document.outcome = "failed";
                document.error = Some(chain(error));
                document.code = Some(error.into());
                let cause = error.cause();
                document.failures = cause.map_or(&[], CoordinatorError::failures);
                document.missing_device_bytes =
                    cause.and_then(CoordinatorError::missing_device_bytes);
                document.shortages = cause
                    .map_or(&[][..], CoordinatorError::shortages)
                    .iter()
                    .map(Shortage::of)
                    .collect();
                document.retryable = error.is_retryable();
                document.unchanged = error.left_unchanged();
            }
        }
        document
    }
}
