//! The tokens of those who may ask over TCP.
//!
//! Their file has hashes only, so that whoever reads it can ask nothing. A token that nobody guesses
//! needs no slow hash.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

use crate::admission::reloading_file::Renewed;
use crate::admission::request_error::RequestError;
use crate::transport::listen::BindError;
use shadowslice_datapath::peer::{Guard, Refusals};

/// In bytes; a thousand tokens have 100 kB.
const MOST: u64 = 1 << 20;

const SCHEME: &str = "bearer ";

type Hash = [u8; 32];

#[derive(Debug, Clone)]
pub(crate) struct Tokens {
    names: Arc<Renewed<HashMap<Hash, String>>>,
    /// Counts the refused.
    guard: Arc<Guard>,
}

impl Tokens {
    pub(crate) fn read(file: &Path, refusals: &Arc<Refusals>) -> Result<Self, BindError> {
        let path = file.to_owned();
        let names = Renewed::read(vec![file.to_owned()], move || read(&path))?;
        Ok(Self { names, guard: Arc::new(Guard::refusing(refusals)) })
    }

    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// The name of the client whose token a request has.
    pub(crate) fn name(&self, headers: &HeaderMap) -> Result<String, RequestError> {
        let refused = |why: &str| Err(RequestError::Unauthenticated(why.to_owned()));
        let Some(given) = headers.get(AUTHORIZATION) else {
            return refused("this address requires a token; send `Authorization: Bearer TOKEN`");
        };
        let token = given.as_bytes().split_at_checked(SCHEME.len());
        let token = token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(SCHEME.as_bytes()));
        let name = token.and_then(|(_, token)| {
            let hash: Hash = Sha256::digest(token.trim_ascii()).into();
            self.names.now().get(&hash).cloned()
        });
        name.map_or_else(|| refused("unknown token"), Ok)
    }
}

fn read(file: &Path) -> Result<HashMap<Hash, String>, BindError> {
    let shown = file.display();
    let failed = |source| BindError::new(format!("cannot read the tokens in {shown}"), Some(source));
    let size = fs::metadata(file).map_err(failed)?.len();
    if size > MOST {
        return Err(BindError::new(
            format!("{shown} has {size} bytes; a file of tokens may have at most {MOST}"),
            None,
        ));
    }
    parse(&fs::read_to_string(file).map_err(failed)?)
        .map_err(|(line, why)| BindError::new(format!("{shown}:{line}: {why}"), None))
}

/// Fails with the number of a line, and what is wrong with it.
fn parse(text: &str) -> Result<HashMap<Hash, String>, (usize, &'static str)> {
    let mut names = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, hash) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let why = "give a name and the SHA-256 of its token, as `printf %s \"$TOKEN\" | sha256sum` prints it";
        let hash = hash_of(hash.trim()).ok_or((index + 1, why))?;
        if names.insert(hash, name.to_owned()).is_some() {
            return Err((index + 1, "this token already has a name; give each client its own token"));
        }
    }
    if names.is_empty() {
        return Err((
            1,
            "the file has no tokens, so the server would refuse every client; add one token per line",
        ));
    }
    Ok(names)
}

/// Of 64 hexadecimal digits; sha256sum has the name of what it read behind them.
fn hash_of(text: &str) -> Option<Hash> {
    let digits = text.split_whitespace().next().filter(|digits| digits.len() == 64 && digits.is_ascii())?;
    let mut hash = Hash::default();
    for (byte, at) in hash.iter_mut().zip((0..).step_by(2)) {
        let pair = &digits[at..at + 2];
        *byte = u8::from_str_radix(pair, 16).ok().filter(|_| !pair.starts_with('+'))?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of "secret".
    const HASH: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn lines_name_hashes() {
        let names = parse(&format!("# ours\n\nci {HASH}  -\n")).unwrap();
        let hash: Hash = Sha256::digest("secret").into();
        assert_eq!(names, HashMap::from([(hash, "ci".to_owned())]));
    }

    #[test]
    fn what_is_no_line_is_told_by_its_number() {
        for bad in ["ci secret", "ci", HASH, &format!("ci +{}", &HASH[1..]), &format!("ci {HASH}0")] {
            assert_eq!(parse(&format!("# ours\n{bad}")).unwrap_err().0, 2, "{bad}");
        }
        assert_eq!(parse(&format!("a {HASH}\nb {HASH}")).unwrap_err().0, 2, "two names");
        assert!(parse("# nobody\n").is_err());
    }
}
