package trinitymq

// fill sets what the columns say and checks the result.
func fill(experiences []Experience, from columns, extensions extension) error {
	for _, step := range []func([]Experience, columns) error{fillIdentity, fillTexts, fillNumbers} {
		if err := step(experiences, from); err != nil {
			return err
		}
	}
	if err := fillDocuments(experiences, from, extensions); err != nil {
		return err
	}
	for number := range experiences {
		if err := experiences[number].check(); err != nil {
			return decodeError("experience %d: %v", number, err)
		}
	}
	return nil
}

func fillIdentity(experiences []Experience, from columns) error {
	batches, err := from.ids("eid.batch")
	if err != nil {
		return err
	}
	tasks, err := from.ids("eid.task")
	if err != nil {
		return err
	}
	runs, err := from.ints("eid.run")
	if err != nil {
		return err
	}
	steps, err := from.ints("eid.step")
	if err != nil {
		return err
	}
	suffixes, err := from.texts("eid.suffix")
	if err != nil {
		return err
	}
	for number := range experiences {
		batch, task, run, step := batches.at(number), tasks.at(number), runs.at(number), steps.at(number)
		suffix := suffixes.at(number)
		if batch == nil || task == nil || run == nil || step == nil || suffix == nil {
			return decodeError("a part of the eid of experience %d is missing", number)
		}
		experiences[number].EID = EID{*batch, *task, *run, *step, *suffix}
	}
	return nil
}

func fillTexts(experiences []Experience, from columns) error {
	for _, column := range []struct {
		name string
		put  func(*Experience, *string)
	}{
		{"experience_type", func(e *Experience, text *string) { e.Type = value(text) }},
		{"truncate_status", func(e *Experience, text *string) { e.TruncateStatus = text }},
		{"prompt_text", func(e *Experience, text *string) { e.PromptText = text }},
		{"response_text", func(e *Experience, text *string) { e.ResponseText = text }},
		{"taskset", func(e *Experience, text *string) { e.Taskset = text }},
	} {
		texts, err := from.texts(column.name)
		if err != nil {
			return err
		}
		for number := range experiences {
			column.put(&experiences[number], texts.at(number))
		}
	}
	return nil
}

func fillNumbers(experiences []Experience, from columns) error {
	prompts, err := from.ints("prompt_length")
	if err != nil {
		return err
	}
	indexes, err := from.ints("index")
	if err != nil {
		return err
	}
	rewards, err := from.floats("reward")
	if err != nil {
		return err
	}
	temperatures, err := from.floats("temperature")
	if err != nil {
		return err
	}
	versions, err := from.versions("versions")
	if err != nil {
		return err
	}
	for number := range experiences {
		one := &experiences[number]
		one.PromptLength = int(value(prompts.at(number)))
		one.Index, one.Reward, one.Temperature = indexes.at(number), rewards.at(number), temperatures.at(number)
		one.Versions = versions[number]
	}
	return nil
}

func fillDocuments(experiences []Experience, from columns, extensions extension) error {
	for _, column := range []struct {
		name string
		put  func(*Experience, any) bool
	}{
		{"info", func(e *Experience, found any) bool { return is(&e.Info, found) }},
		{"metrics", func(e *Experience, found any) bool { return is(&e.Metrics, found) }},
		{"messages", func(e *Experience, found any) bool { return is(&e.Messages, found) }},
		{"tools", func(e *Experience, found any) bool { return is(&e.Tools, found) }},
		{"chosen_messages", func(e *Experience, found any) bool { return is(&e.ChosenMessages, found) }},
		{"rejected_messages", func(e *Experience, found any) bool { return is(&e.RejectedMessages, found) }},
		{"custom_fields", putCustomFields},
	} {
		documents, err := from.documents(column.name, extensions)
		if err != nil {
			return err
		}
		for number := range experiences {
			if found := documents.at(number); found != nil && !column.put(&experiences[number], *found) {
				return decodeError("%s of experience %d is %s, which it cannot be", column.name, number, short(*found))
			}
		}
	}
	return nil
}

// is sets target if found is of its type.
func is[T any](target *T, found any) (ok bool) {
	if typed, fits := found.(T); fits {
		*target, ok = typed, true
	}
	return ok
}

// value is what a pointer points to, the zero value for nil.
func value[T any](pointer *T) (found T) {
	if pointer != nil {
		found = *pointer
	}
	return found
}

func putCustomFields(e *Experience, found any) bool {
	items, ok := found.([]any)
	for _, item := range items {
		parts, _ := item.([]any)
		if len(parts) != 3 {
			return false
		}
		var texts [3]string
		for number, part := range parts {
			if texts[number], ok = part.(string); !ok {
				return false
			}
		}
		e.CustomFields = append(e.CustomFields, CustomField{texts[0], texts[1], texts[2]})
	}
	return ok
}
