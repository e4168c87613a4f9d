//! Rust source without its comments and literals, so that a search finds code alone.

/// `text` with every comment, string and character literal blanked out.
///
/// Bytes keep their places and lines stay lines, so an offset into the result is one into `text`.
pub(crate) fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    let mut previous = ' ';
    while let Some(first) = rest.chars().next() {
        let starts_word = !is_word(previous);
        let length = comment(rest)
            .or_else(|| starts_word.then(|| raw_string(rest)).flatten())
            .or_else(|| quoted(rest));
        let (piece, after) = rest.split_at(length.unwrap_or(first.len_utf8()));
        if length.is_some() {
            blank(piece, &mut code);
            previous = ' ';
        } else {
            code.push_str(piece);
            previous = first;
        }
        rest = after;
    }
    code
}

/// The offsets at which `name` stands in `code` as a whole word.
pub(crate) fn words<'a>(code: &'a str, name: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(name).map(|(offset, _)| offset).filter(|offset| {
        let before = code[..*offset].chars().next_back();
        let after = code[offset + name.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn blank(piece: &str, code: &mut String) {
    for byte in piece.bytes() {
        code.push(if byte == b'\n' { '\n' } else { ' ' });
    }
}

/// The length of the comment that `rest` begins with.
fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if !rest.starts_with("/*") {
        return None;
    }
    let bytes = rest.as_bytes();
    let mut depth = 0_usize;
    let mut offset = 0;
    while offset < bytes.len() {
        if bytes[offset..].starts_with(b"/*") {
            depth += 1;
            offset += 2;
        } else if bytes[offset..].starts_with(b"*/") {
            depth -= 1;
            offset += 2;
            if depth == 0 {
                return Some(offset);
            }
        } else {
            offset += 1;
        }
    }
    Some(rest.len())
}

/// The length of the raw string (`r"`, `br#"`, `cr##"`) that `rest` begins with.
fn raw_string(rest: &str) -> Option<usize> {
    let opening = ["r", "br", "cr"].into_iter().find(|prefix| {
        rest.strip_prefix(prefix).is_some_and(|tail| tail.starts_with(['"', '#']))
    })?;
    let tail = &rest[opening.len()..];
    let hashes = tail.len() - tail.trim_start_matches('#').len();
    // `r#name` is a word, not a string.
    let body = tail[hashes..].strip_prefix('"')?;
    let closing = format!("\"{}", "#".repeat(hashes));
    let begin = rest.len() - body.len();
    let length = body.find(&closing).map(|end| begin + end + closing.len());
    Some(length.unwrap_or(rest.len()))
}

/// The length of the string or character literal that `rest` begins with.
fn quoted(rest: &str) -> Option<usize> {
    let mut characters = rest.char_indices();
    let (_, quote) = characters.next()?;
    if quote == '\'' {
        // `'a'` and `'\n'` are characters, `'a` alone is a lifetime.
        let mut ahead = rest.chars().skip(1);
        let escaped = ahead.next()? == '\\';
        if !escaped && ahead.next() != Some('\'') {
            return None;
        }
    } else if quote != '"' {
        return None;
    }
    let mut escaped = false;
    for (offset, character) in characters {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return Some(offset + 1),
            _ => {}
        }
    }
    Some(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_offsets_kept() {
        let text = "a /* x /* y */ z */ b // c\nd \"e\\\"f\" r#\"g\"h\"# 'i' '\\'' j";
        let code = code_only(text);
        assert_eq!(code.len(), text.len());
        let left: Vec<&str> = code.split_whitespace().collect();
        assert_eq!(left, ["a", "b", "d", "j"]);
        assert_eq!(code.find('\n'), text.find('\n'));
    }

    #[test]
    fn lifetimes_raw_identifiers_and_non_ascii_text_survive() {
        let text = "fn f<'a>(r#type: &'a str) { let s = \"é\"; g('é') }";
        let code = code_only(text);
        assert_eq!(code.len(), text.len());
        assert!(code.starts_with("fn f<'a>(r#type: &'a str) { let s = "));
        assert!(code.ends_with(" }"));
    }

    #[test]
    fn words_are_whole() {
        let code = "dbg!(x); my_dbg!(x); dbg!()";
        assert_eq!(words(code, "dbg").collect::<Vec<_>>(), [0, 21]);
    }
}
