//! The settings by which a tenant takes turns with others, and their texts.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{IntoDeserializer as _, value};
use serde::{Deserialize, Serialize};

use crate::time;

/// The environment variable with [`TurnSettings`].
pub const TURNS_VARIABLE: &str = "SUBLET_TURNS";
/// The word for [`TurnSettings::queues`].
pub const TURNS_AUTO: &str = "auto";
/// The word for [`TurnSettings::deep`].
pub const TURNS_DEEP: &str = "deep";

/// The rank of a tenant among those that take turns; the greater comes first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Class {
    /// Runs in the gaps that others leave.
    Background,
    /// Has a share, by its weight.
    #[default]
    Fair,
    /// Waits for others no longer than a bound.
    Guaranteed,
}

/// The class in `--class`, or in `SUBLET_TURNS`, is unknown. `sublet run` does not start the job. Without `sublet
/// run`, the word counts as not set, and a note says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is no class: say guaranteed, fair or background")]
pub struct ClassError {
    given: String,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Serde defines the names.
        self.serialize(f)
    }
}

impl FromStr for Class {
    type Err = ClassError;

    fn from_str(text: &str) -> Result<Self, ClassError> {
        let read: Result<Self, value::Error> = Self::deserialize(text.into_deserializer());
        read.map_err(|_| ClassError { given: text.chars().take(60).collect() })
    }
}

/// The number of quanta that a fair tenant has at a time: 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Weight(NonZeroU32);

/// The weight in `--weight`, or in `SUBLET_TURNS`, is not a number from 1 to the limit. `sublet run` does not start
/// the job. Without `sublet run`, the number counts as not set, and a note says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is no weight: give a number from 1 to {}", Weight::MAX)]
pub struct WeightError {
    given: String,
}

impl Weight {
    /// The largest weight.
    pub const MAX: u32 = 100;

    /// The weight as a number.
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

/// The settings of a tenant for turns. They are written and read as `auto,deep,class=background,weight=2,wait=2m`, or some of
/// these parts, in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnSettings {
    /// Do its resumes and its allocations wait in the queue for other tenants to free memory when its devices have too little?
    /// Do its processes also resume without a command after a pause for another tenant?
    pub queues: bool,
    /// Do its contexts leave the devices too during a pause: after this time, or when another tenant lacks room? `deep` alone
    /// means one minute.
    pub deep: Option<Duration>,
    /// Its rank among the others.
    pub class: Class,
    /// The number of quanta that it has at a time.
    pub weight: Weight,
    /// The time for which an allocation waits for room.
    pub wait: Duration,
}

/// A text that is no part of [`TurnSettings`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnSettingsError {
    /// A wrong class.
    #[error(transparent)]
    Class(#[from] ClassError),
    /// A wrong weight.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A wrong time; the text says what is expected.
    #[error("{0}")]
    Wait(String),
    /// A part of `SUBLET_TURNS` is wrong and counts as not set. Give some of
    /// `auto,deep,class=background,weight=2,wait=2m`.
    #[error("'{given}' is none of auto, deep, class=, weight= and wait=")]
    Unknown {
        /// The start of it.
        given: String,
    },
}

impl TurnSettings {
    /// The wait of an allocation: less than the ten minutes after which PyTorch's watchdog ends a job whose ranks wait for each
    /// other.
    const WAIT: Duration = Duration::from_mins(2);
    /// The time for which a paused tenant keeps its contexts. They leave and return in less than a second, a small
    /// part of this minute.
    const REST: Duration = Duration::from_mins(1);
}

impl Default for TurnSettings {
    fn default() -> Self {
        let (class, weight) = (Class::default(), Weight::default());
        Self { queues: false, deep: None, class, weight, wait: Self::WAIT }
    }
}

impl FromStr for TurnSettings {
    type Err = TurnSettingsError;

    fn from_str(text: &str) -> Result<Self, TurnSettingsError> {
        let mut read = Self::default();
        for part in text.split(',').map(str::trim) {
            match part.split_once('=') {
                None if part == TURNS_AUTO => read.queues = true,
                None if part == TURNS_DEEP => read.deep = Some(Self::REST),
                Some((TURNS_DEEP, rest)) => {
                    read.deep = Some(time::parse(rest).map_err(TurnSettingsError::Wait)?);
                }
                Some(("class", class)) => read.class = class.parse()?,
                Some(("weight", weight)) => read.weight = weight.parse()?,
                Some(("wait", wait)) => {
                    read.wait = time::parse(wait).map_err(TurnSettingsError::Wait)?;
                }
                None | Some(_) => {
                    let given = part.chars().take(60).collect();
                    return Err(TurnSettingsError::Unknown { given });
                }
            }
        }
        Ok(read)
    }
}

impl fmt::Display for TurnSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queues, deep, class, weight, wait } = self;
        f.write_str(if *queues { "auto," } else { "" })?;
        if let Some(rest) = deep {
            write!(f, "{TURNS_DEEP}={},", humantime::format_duration(*rest))?;
        }
        let wait = humantime::format_duration(*wait);
        write!(f, "class={class},weight={weight},wait={wait}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_to_take_turns_is_read_in_parts_and_as_it_is_written() {
        let usual = TurnSettings::default();
        for (text, expected) in [
            ("auto", TurnSettings { queues: true, ..usual }),
            ("class=background", TurnSettings { class: Class::Background, ..usual }),
            (
                "weight=2, auto",
                TurnSettings { queues: true, weight: "2".parse().unwrap(), ..usual },
            ),
            ("wait=1m 30s", TurnSettings { wait: Duration::from_secs(90), ..usual }),
            ("deep", TurnSettings { deep: Some(Duration::from_mins(1)), ..usual }),
            (
                "auto,deep=5s",
                TurnSettings { queues: true, deep: Some(Duration::from_secs(5)), ..usual },
            ),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
            assert_eq!(expected.to_string().parse(), Ok(expected), "{text}");
        }
        for text in
            ["often", "auto,", "auto=1", "deep=x", "class", "class=urgent", "weight=0", "wait=2d"]
        {
            assert!(text.parse::<TurnSettings>().is_err(), "{text}");
        }
    }

    #[test]
    fn classes_and_weights_are_read_and_others_are_refused_by_name() {
        for class in [Class::Background, Class::Fair, Class::Guaranteed] {
            assert_eq!(class.to_string().parse(), Ok(class));
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
