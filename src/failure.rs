//! An [`Error`] as it is written down: on the control socket, in a registration, in `--json`.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind};

/// What failed and why, and what to do about it. The names of the fields are API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// [`Kind::name`].
    pub kind: String,
    /// The one line.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Failure {
        Failure {
            kind: error.kind().name().to_owned(),
            message: error.message().to_owned(),
            hint: error.hint_text().map(str::to_owned),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        let error = Error::new(Kind::from_name(&failure.kind), failure.message);
        match failure.hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(error: &Error) -> String {
        serde_json::to_string(&Failure::from(error)).expect("JSON")
    }

    #[test]
    fn errors_are_written_and_read_back() {
        let error = Error::new(Kind::NoRoom, "no room").hint("make some");
        let json = written(&error);
        assert_eq!(json, r#"{"kind":"no-room","message":"no room","hint":"make some"}"#);
        let back = Error::from(serde_json::from_str::<Failure>(&json).expect("read back"));
        assert_eq!(
            (back.kind(), back.message(), back.hint_text()),
            (Kind::NoRoom, "no room", Some("make some"))
        );
        assert_eq!(written(&Error::new(Kind::Failed, "no")), r#"{"kind":"failed","message":"no"}"#);
    }

    #[test]
    fn what_a_newer_program_writes_is_read() {
        let json = r#"{"kind":"from-the-future","message":"m","new":1}"#;
        let back = Error::from(serde_json::from_str::<Failure>(json).expect("read"));
        assert_eq!((back.kind(), back.message(), back.hint_text()), (Kind::Failed, "m", None));
    }
}
