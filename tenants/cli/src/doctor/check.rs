//! One finding, and how much it matters.

use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(super) enum Level {
    Ok,
    /// Works, but not as well as it could, or not for everything.
    Warn,
    /// Does not work.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(super) struct Check {
    pub(super) level: Level,
    pub(super) subject: String,
    /// What was found.
    pub(super) finding: String,
    /// What to do about it.
    pub(super) next_step: Option<String>,
}

impl Check {
    pub(super) fn ok(subject: impl Into<String>, finding: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject: subject.into(), finding: finding.into(), next_step: None }
    }

    pub(super) fn warn(
        subject: impl Into<String>,
        finding: impl Into<String>,
        next_step: impl Into<String>,
    ) -> Self {
        Self { level: Level::Warn, next_step: Some(next_step.into()), ..Self::ok(subject, finding) }
    }

    pub(super) fn fail(
        subject: impl Into<String>,
        finding: impl Into<String>,
        next_step: impl Into<String>,
    ) -> Self {
        Self { level: Level::Fail, ..Self::warn(subject, finding, next_step) }
    }
}
