//! What a tenant is to the others when they take turns.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Name of the environment variable with the class of a process's tenant.
pub const CLASS_VARIABLE: &str = "SUBLET_CLASS";
/// Name of the environment variable with the weight of a process's tenant.
pub const WEIGHT_VARIABLE: &str = "SUBLET_WEIGHT";

/// Name of the environment variable that says whether resumes and allocations of a process's tenant queue: [`TURNS_AUTO`], or nothing.
pub const TURNS_VARIABLE: &str = "SUBLET_TURNS";
/// They do, and its processes come back by themselves when they were paused for another.
pub const TURNS_AUTO: &str = "auto";
/// Name of the environment variable that says for how long an allocation waits, in milliseconds.
pub const TURNS_TIMEOUT_VARIABLE: &str = "SUBLET_TURNS_TIMEOUT_MS";

/// Who gives way to whom; the greater comes first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Runs in the gaps that others leave.
    Background,
    /// Has a share, by its weight.
    #[default]
    Fair,
    /// Waits for others no longer than a bound.
    Guaranteed,
}

/// A text that is no class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is no class: say guaranteed, fair or background")]
pub struct ClassError {
    given: String,
}

impl Class {
    /// Its name.
    pub fn label(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::Fair => "fair",
            Self::Guaranteed => "guaranteed",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl FromStr for Class {
    type Err = ClassError;

    fn from_str(text: &str) -> Result<Self, ClassError> {
        let all = [Self::Background, Self::Fair, Self::Guaranteed];
        all.into_iter()
            .find(|class| class.label() == text)
            .ok_or_else(|| ClassError { given: text.chars().take(60).collect() })
    }
}

/// How many quanta a fair tenant has at a time: 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Weight(NonZeroU32);

/// What is no weight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is no weight: give a number from 1 to {}", Weight::MAX)]
pub struct WeightError {
    given: String,
}

impl Weight {
    /// The largest.
    pub const MAX: u32 = 100;

    /// The number.
    pub fn get(self) -> u64 {
        u64::from(self.0.get())
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(NonZeroU32::MIN)
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Weight {
    type Err = WeightError;

    fn from_str(text: &str) -> Result<Self, WeightError> {
        let number = text.parse().ok().filter(|number: &NonZeroU32| number.get() <= Self::MAX);
        number.map(Self).ok_or_else(|| WeightError { given: text.chars().take(60).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_and_weights_are_read_and_others_are_refused_by_name() {
        for class in [Class::Background, Class::Fair, Class::Guaranteed] {
            assert_eq!(class.label().parse(), Ok(class));
        }
        assert!(Class::Guaranteed > Class::Fair && Class::Fair > Class::Background);
        let error = "urgent".parse::<Class>().unwrap_err().to_string();
        assert_eq!(error, "'urgent' is no class: say guaranteed, fair or background");
        assert_eq!("2".parse::<Weight>().unwrap().get(), 2);
        for text in ["0", "-1", "101", "", "two", "1.5"] {
            let error = text.parse::<Weight>().unwrap_err().to_string();
            assert!(error.contains("from 1 to 100"), "{error}");
        }
    }
}
