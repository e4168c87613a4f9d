//! The reason why a command ends early, and its exit code.

use std::error::Error;
use std::ffi::OsStr;
use std::fmt;
use std::io::{self, ErrorKind};
use std::process::ExitCode;

use serde::Serialize;
use tenants::code::Code;
use tenants::coordinator::Trouble;
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::run_dir::RunDirError;

use crate::advice;
use crate::gpus::Gpus;

/// Refused or failed, nothing changed.
pub(crate) const EXIT_UNCHANGED: u8 = 1;
/// Wrong usage.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Changed, but not wholly as asked.
pub(crate) const EXIT_PARTIAL: u8 = 3;
/// Called off by Ctrl-C or SIGTERM, nothing changed. It is the code of shells for Ctrl-C.
pub(crate) const EXIT_CALLED_OFF: u8 = 130;
/// The command to run exists but cannot be run. It is the code of shells for that.
const EXIT_NOT_EXECUTABLE: u8 = 126;
/// The command to run was not found. It is the code of shells for that.
pub(crate) const EXIT_NOT_FOUND: u8 = 127;

/// A one-line message, an exit code, and a word for programs.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    exit: u8,
    code: Code,
    /// The tenant that it is about, if that has no process.
    nobody: Option<TenantName>,
    /// Does a GPU lack memory that no other tenant could free?
    is_outside: bool,
}

/// A failure as programs read it.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Document<'a> {
    error: &'a str,
    code: Code,
}

impl Failure {
    pub(crate) fn new(message: String, exit: u8) -> Self {
        let code = match exit {
            EXIT_USAGE => Code::Usage,
            EXIT_CALLED_OFF => Code::CalledOff,
            _ => Code::Other,
        };
        Self { message, exit, code, nobody: None, is_outside: false }
    }

    /// Creates the failure of `error` and its causes, in one line.
    pub(crate) fn of(error: &(dyn Error + 'static), exit: u8) -> Self {
        Self::new(chain(error), exit)
    }

    /// Creates the failure of a command for tenants, with the text `message`.
    pub(crate) fn of_change(message: String, error: &Trouble) -> Self {
        let nobody = if let Trouble::NoSuchTenant { tenant, .. }
        | Trouble::NoProcess { tenant, .. } = error
        {
            Some(tenant.clone())
        } else {
            None
        };
        let is_outside = error.shortages().iter().any(|short| !short.others_could_give_it());
        Self { nobody, is_outside, ..Self::new(message, exit_code_of(error)).because(error) }
    }

    /// Creates the failure of a program that did not start, with the exit code of shells for it.
    pub(crate) fn of_start(program: &OsStr, error: &io::Error) -> Self {
        let shown = program.display();
        if error.kind() == ErrorKind::NotFound {
            Self::new(format!("command '{shown}' was not found"), EXIT_NOT_FOUND)
        } else {
            let message = format!("command '{shown}' could not be started: {error}");
            Self::new(message, EXIT_NOT_EXECUTABLE)
        }
    }

    /// Adds a code that says more than the exit code.
    pub(crate) fn because(self, code: impl Into<Code>) -> Self {
        Self { code: code.into(), ..self }
    }

    /// Returns the tenant that was not found.
    pub(crate) fn nobody(&self) -> Option<&TenantName> {
        self.nobody.as_ref()
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.exit)
    }

    pub(crate) fn document(&self) -> Document<'_> {
        Document { error: &self.message, code: self.code }
    }

    /// Returns the message for a person: with its code, short names of GPUs, and a next command if the message has none.
    pub(crate) fn told(&self) -> String {
        self.told_after(&advice::typed())
    }

    /// As [`Failure::told`], for the command line `words`.
    pub(crate) fn told_after(&self, words: &[String]) -> String {
        let said = self.message.trim_end_matches('.');
        let said = Gpus::numbered(said);
        let next = advice::next(self.code, self.is_outside, words);
        let next = next.filter(|_| !said.contains("`sublet "));
        let next = next.map_or_else(String::new, |next| format!("; next: {next}"));
        let code = (self.code != Code::Other).then(|| format!(" [{}]", self.code));
        let code = code.unwrap_or_default();
        format!("{said}{code}{next}")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<RunDirError> for Failure {
    fn from(error: RunDirError) -> Self {
        Self::of(&error, EXIT_UNCHANGED).because(&error)
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        Self::of_change(chain(&trouble), &trouble)
    }
}

pub(crate) fn exit_code_of(trouble: &Trouble) -> u8 {
    if trouble.left_unchanged() { Code::from(trouble).exit() } else { EXIT_PARTIAL }
}
