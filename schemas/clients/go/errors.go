package trinitymq

import (
	"errors"
	"fmt"
)

// What went wrong, for errors.Is. The errors returned wrap these and say more.
var (
	// ErrNoRun: no queue takes tasks under that run's name on this broker.
	ErrNoRun = errors.New("run takes no tasks on this broker")
	// ErrLost: the connection to the broker is gone; what was pending is unknown. Connect again.
	ErrLost = errors.New("connection to the broker lost")
	// ErrNotConfirmed: the broker did not take the task, or nobody knows whether it did. Publish it again under the
	// same id: it is done once.
	ErrNotConfirmed = errors.New("task not confirmed by the broker")
	// ErrPending: this client already waits for a task of that id.
	ErrPending = errors.New("already waiting for that id")
	// ErrInvalid: the task, or the run's name, cannot be sent as it is.
	ErrInvalid = errors.New("invalid")
	// ErrDecode: a body is not what it should be.
	ErrDecode = errors.New("body does not decode")
)

func decodeError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDecode, fmt.Sprintf(format, args...))
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
