//! The one way to standard output. A reader that has gone away (`sublet ps | head -1`) is no error.

use std::io::{self, ErrorKind, Write as _};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::units;

/// Changes when a program that reads the documents of the version before would misread them (`docs/json.md`).
pub(crate) const JSON_VERSION: u32 = 1;

/// A document as it is printed.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Versioned<T> {
    /// 1. It changes when a program that reads documents of the version before would misread them.
    version: u32,
    #[serde(flatten)]
    fields: T,
}

/// Lines to be printed, written together at the end.
#[derive(Debug, Default)]
pub(crate) struct Output {
    text: String,
    /// Columns of the terminal, if one reads.
    columns: Option<usize>,
}

impl Output {
    pub(crate) fn new() -> Self {
        Self { text: String::new(), columns: Table::new().width().map(usize::from) }
    }

    pub(crate) fn line(&mut self, line: impl AsRef<str>) {
        self.text.push_str(line.as_ref());
        self.text.push('\n');
    }

    pub(crate) fn lines(&mut self, lines: impl IntoIterator<Item = String>) {
        lines.into_iter().for_each(|line| self.line(line));
    }

    /// Text of any number of whole lines.
    pub(crate) fn text_block(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Lines are cut at the end of a terminal: what is longest stands last.
    pub(crate) fn table(&mut self, table: &Table) {
        for line in table.lines() {
            let columns = self.columns.unwrap_or(usize::MAX);
            self.line(units::shortened(line.trim_end(), columns));
        }
    }

    /// A document for programs, indented, with [`JSON_VERSION`] as its first field. `fields` is a struct.
    pub(crate) fn json(&mut self, fields: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(&Versioned { version: JSON_VERSION, fields })
            .map_err(|error| Failure::of(&error, EXIT_UNCHANGED))?;
        self.line(text);
        Ok(())
    }

    /// Writes all lines.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(self.text.as_bytes()).and_then(|()| stdout.flush());
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                let message = format!("standard output could not be written: {error}");
                Err(Failure::new(message, EXIT_UNCHANGED))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub(crate) fn into_lines(self) -> Vec<String> {
        self.text.lines().map(str::to_owned).collect()
    }

    #[cfg(test)]
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

/// Tells a person on standard error. Nobody can be told when that fails, so it is not checked.
pub(crate) fn complain(message: &str) {
    writeln!(io::stderr().lock(), "sublet: {message}").ok();
}

/// A plain table: no lines, two blanks between columns, as wide as its content; columns whose index is
/// in `right` hold figures.
pub(crate) fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.set_header(header.iter().copied());
    plain(&mut table);
    for index in right {
        if let Some(column) = table.column_mut(*index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// As [`table`], for rows that need no titles.
pub(crate) fn table_without_header<const N: usize>(
    rows: impl IntoIterator<Item = [String; N]>,
) -> Table {
    let mut table = Table::new();
    for row in rows {
        table.add_row(row);
    }
    plain(&mut table);
    table
}

fn plain(table: &mut Table) {
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .force_no_tty();
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
}
